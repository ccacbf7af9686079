var lt=globalThis,dt=lt.ShadowRoot&&(lt.ShadyCSS===void 0||lt.ShadyCSS.nativeShadow)&&"adoptedStyleSheets"in Document.prototype&&"replace"in CSSStyleSheet.prototype,fe=Symbol(),me=new WeakMap,ct=class{constructor(t,e,r){if(this._$cssResult$=!0,r!==fe)throw Error("CSSResult is not constructable. Use `unsafeCSS` or `css` instead.");this.cssText=t,this.t=e}get styleSheet(){let t=this.o,e=this.t;if(dt&&t===void 0){let r=e!==void 0&&e.length===1;r&&(t=me.get(e)),t===void 0&&((this.o=t=new CSSStyleSheet).replaceSync(this.cssText),r&&me.set(e,t))}return t}toString(){return this.cssText}},be=s=>new ct(typeof s=="string"?s:s+"",void 0,fe);var ge=(s,t)=>{if(dt)s.adoptedStyleSheets=t.map(e=>e instanceof CSSStyleSheet?e:e.styleSheet);else for(let e of t){let r=document.createElement("style"),n=lt.litNonce;n!==void 0&&r.setAttribute("nonce",n),r.textContent=e.cssText,s.appendChild(r)}},Et=dt?s=>s:s=>s instanceof CSSStyleSheet?(t=>{let e="";for(let r of t.cssRules)e+=r.cssText;return be(e)})(s):s;var{is:gs,defineProperty:xs,getOwnPropertyDescriptor:$s,getOwnPropertyNames:ys,getOwnPropertySymbols:vs,getPrototypeOf:_s}=Object,ht=globalThis,xe=ht.trustedTypes,ws=xe?xe.emptyScript:"",Es=ht.reactiveElementPolyfillSupport,V=(s,t)=>s,At={toAttribute(s,t){switch(t){case Boolean:s=s?ws:null;break;case Object:case Array:s=s==null?s:JSON.stringify(s)}return s},fromAttribute(s,t){let e=s;switch(t){case Boolean:e=s!==null;break;case Number:e=s===null?null:Number(s);break;case Object:case Array:try{e=JSON.parse(s)}catch{e=null}}return e}},ye=(s,t)=>!gs(s,t),$e={attribute:!0,type:String,converter:At,reflect:!1,useDefault:!1,hasChanged:ye};Symbol.metadata??=Symbol("metadata"),ht.litPropertyMetadata??=new WeakMap;var k=class extends HTMLElement{static addInitializer(t){this._$Ei(),(this.l??=[]).push(t)}static get observedAttributes(){return this.finalize(),this._$Eh&&[...this._$Eh.keys()]}static createProperty(t,e=$e){if(e.state&&(e.attribute=!1),this._$Ei(),this.prototype.hasOwnProperty(t)&&((e=Object.create(e)).wrapped=!0),this.elementProperties.set(t,e),!e.noAccessor){let r=Symbol(),n=this.getPropertyDescriptor(t,r,e);n!==void 0&&xs(this.prototype,t,n)}}static getPropertyDescriptor(t,e,r){let{get:n,set:i}=$s(this.prototype,t)??{get(){return this[e]},set(o){this[e]=o}};return{get:n,set(o){let d=n?.call(this);i?.call(this,o),this.requestUpdate(t,d,r)},configurable:!0,enumerable:!0}}static getPropertyOptions(t){return this.elementProperties.get(t)??$e}static _$Ei(){if(this.hasOwnProperty(V("elementProperties")))return;let t=_s(this);t.finalize(),t.l!==void 0&&(this.l=[...t.l]),this.elementProperties=new Map(t.elementProperties)}static finalize(){if(this.hasOwnProperty(V("finalized")))return;if(this.finalized=!0,this._$Ei(),this.hasOwnProperty(V("properties"))){let e=this.properties,r=[...ys(e),...vs(e)];for(let n of r)this.createProperty(n,e[n])}let t=this[Symbol.metadata];if(t!==null){let e=litPropertyMetadata.get(t);if(e!==void 0)for(let[r,n]of e)this.elementProperties.set(r,n)}this._$Eh=new Map;for(let[e,r]of this.elementProperties){let n=this._$Eu(e,r);n!==void 0&&this._$Eh.set(n,e)}this.elementStyles=this.finalizeStyles(this.styles)}static finalizeStyles(t){let e=[];if(Array.isArray(t)){let r=new Set(t.flat(1/0).reverse());for(let n of r)e.unshift(Et(n))}else t!==void 0&&e.push(Et(t));return e}static _$Eu(t,e){let r=e.attribute;return r===!1?void 0:typeof r=="string"?r:typeof t=="string"?t.toLowerCase():void 0}constructor(){super(),this._$Ep=void 0,this.isUpdatePending=!1,this.hasUpdated=!1,this._$Em=null,this._$Ev()}_$Ev(){this._$ES=new Promise(t=>this.enableUpdating=t),this._$AL=new Map,this._$E_(),this.requestUpdate(),this.constructor.l?.forEach(t=>t(this))}addController(t){(this._$EO??=new Set).add(t),this.renderRoot!==void 0&&this.isConnected&&t.hostConnected?.()}removeController(t){this._$EO?.delete(t)}_$E_(){let t=new Map,e=this.constructor.elementProperties;for(let r of e.keys())this.hasOwnProperty(r)&&(t.set(r,this[r]),delete this[r]);t.size>0&&(this._$Ep=t)}createRenderRoot(){let t=this.shadowRoot??this.attachShadow(this.constructor.shadowRootOptions);return ge(t,this.constructor.elementStyles),t}connectedCallback(){this.renderRoot??=this.createRenderRoot(),this.enableUpdating(!0),this._$EO?.forEach(t=>t.hostConnected?.())}enableUpdating(t){}disconnectedCallback(){this._$EO?.forEach(t=>t.hostDisconnected?.())}attributeChangedCallback(t,e,r){this._$AK(t,r)}_$ET(t,e){let r=this.constructor.elementProperties.get(t),n=this.constructor._$Eu(t,r);if(n!==void 0&&r.reflect===!0){let i=(r.converter?.toAttribute!==void 0?r.converter:At).toAttribute(e,r.type);this._$Em=t,i==null?this.removeAttribute(n):this.setAttribute(n,i),this._$Em=null}}_$AK(t,e){let r=this.constructor,n=r._$Eh.get(t);if(n!==void 0&&this._$Em!==n){let i=r.getPropertyOptions(n),o=typeof i.converter=="function"?{fromAttribute:i.converter}:i.converter?.fromAttribute!==void 0?i.converter:At;this._$Em=n;let d=o.fromAttribute(e,i.type);this[n]=d??this._$Ej?.get(n)??d,this._$Em=null}}requestUpdate(t,e,r,n=!1,i){if(t!==void 0){let o=this.constructor;if(n===!1&&(i=this[t]),r??=o.getPropertyOptions(t),!((r.hasChanged??ye)(i,e)||r.useDefault&&r.reflect&&i===this._$Ej?.get(t)&&!this.hasAttribute(o._$Eu(t,r))))return;this.C(t,e,r)}this.isUpdatePending===!1&&(this._$ES=this._$EP())}C(t,e,{useDefault:r,reflect:n,wrapped:i},o){r&&!(this._$Ej??=new Map).has(t)&&(this._$Ej.set(t,o??e??this[t]),i!==!0||o!==void 0)||(this._$AL.has(t)||(this.hasUpdated||r||(e=void 0),this._$AL.set(t,e)),n===!0&&this._$Em!==t&&(this._$Eq??=new Set).add(t))}async _$EP(){this.isUpdatePending=!0;try{await this._$ES}catch(e){Promise.reject(e)}let t=this.scheduleUpdate();return t!=null&&await t,!this.isUpdatePending}scheduleUpdate(){return this.performUpdate()}performUpdate(){if(!this.isUpdatePending)return;if(!this.hasUpdated){if(this.renderRoot??=this.createRenderRoot(),this._$Ep){for(let[n,i]of this._$Ep)this[n]=i;this._$Ep=void 0}let r=this.constructor.elementProperties;if(r.size>0)for(let[n,i]of r){let{wrapped:o}=i,d=this[n];o!==!0||this._$AL.has(n)||d===void 0||this.C(n,void 0,i,d)}}let t=!1,e=this._$AL;try{t=this.shouldUpdate(e),t?(this.willUpdate(e),this._$EO?.forEach(r=>r.hostUpdate?.()),this.update(e)):this._$EM()}catch(r){throw t=!1,this._$EM(),r}t&&this._$AE(e)}willUpdate(t){}_$AE(t){this._$EO?.forEach(e=>e.hostUpdated?.()),this.hasUpdated||(this.hasUpdated=!0,this.firstUpdated(t)),this.updated(t)}_$EM(){this._$AL=new Map,this.isUpdatePending=!1}get updateComplete(){return this.getUpdateComplete()}getUpdateComplete(){return this._$ES}shouldUpdate(t){return!0}update(t){this._$Eq&&=this._$Eq.forEach(e=>this._$ET(e,this[e])),this._$EM()}updated(t){}firstUpdated(t){}};k.elementStyles=[],k.shadowRootOptions={mode:"open"},k[V("elementProperties")]=new Map,k[V("finalized")]=new Map,Es?.({ReactiveElement:k}),(ht.reactiveElementVersions??=[]).push("2.1.2");var Ot=globalThis,ve=s=>s,ut=Ot.trustedTypes,_e=ut?ut.createPolicy("lit-html",{createHTML:s=>s}):void 0,Te="$lit$",C=`lit$${Math.random().toFixed(9).slice(2)}$`,Ce="?"+C,As=`<${Ce}>`,P=document,et=()=>P.createComment(""),st=s=>s===null||typeof s!="object"&&typeof s!="function",Ut=Array.isArray,ks=s=>Ut(s)||typeof s?.[Symbol.iterator]=="function",kt=`[ 	
\f\r]`,tt=/<(?:(!--|\/[^a-zA-Z])|(\/?[a-zA-Z][^>\s]*)|(\/?$))/g,we=/-->/g,Ee=/>/g,B=RegExp(`>|${kt}(?:([^\\s"'>=/]+)(${kt}*=${kt}*(?:[^ 	
\f\r"'\`<>=]|("|')|))|$)`,"g"),Ae=/'/g,ke=/"/g,Re=/^(?:script|style|textarea|title)$/i,Mt=s=>(t,...e)=>({_$litType$:s,strings:t,values:e}),a=Mt(1),R=Mt(2),br=Mt(3),N=Symbol.for("lit-noChange"),v=Symbol.for("lit-nothing"),Se=new WeakMap,I=P.createTreeWalker(P,129);function Le(s,t){if(!Ut(s)||!s.hasOwnProperty("raw"))throw Error("invalid template strings array");return _e!==void 0?_e.createHTML(t):t}var Ss=(s,t)=>{let e=s.length-1,r=[],n,i=t===2?"<svg>":t===3?"<math>":"",o=tt;for(let d=0;d<e;d++){let c=s[d],h,u,l=-1,p=0;for(;p<c.length&&(o.lastIndex=p,u=o.exec(c),u!==null);)p=o.lastIndex,o===tt?u[1]==="!--"?o=we:u[1]!==void 0?o=Ee:u[2]!==void 0?(Re.test(u[2])&&(n=RegExp("</"+u[2],"g")),o=B):u[3]!==void 0&&(o=B):o===B?u[0]===">"?(o=n??tt,l=-1):u[1]===void 0?l=-2:(l=o.lastIndex-u[2].length,h=u[1],o=u[3]===void 0?B:u[3]==='"'?ke:Ae):o===ke||o===Ae?o=B:o===we||o===Ee?o=tt:(o=B,n=void 0);let f=o===B&&s[d+1].startsWith("/>")?" ":"";i+=o===tt?c+As:l>=0?(r.push(h),c.slice(0,l)+Te+c.slice(l)+C+f):c+C+(l===-2?d:f)}return[Le(s,i+(s[e]||"<?>")+(t===2?"</svg>":t===3?"</math>":"")),r]},rt=class s{constructor({strings:t,_$litType$:e},r){let n;this.parts=[];let i=0,o=0,d=t.length-1,c=this.parts,[h,u]=Ss(t,e);if(this.el=s.createElement(h,r),I.currentNode=this.el.content,e===2||e===3){let l=this.el.content.firstChild;l.replaceWith(...l.childNodes)}for(;(n=I.nextNode())!==null&&c.length<d;){if(n.nodeType===1){if(n.hasAttributes())for(let l of n.getAttributeNames())if(l.endsWith(Te)){let p=u[o++],f=n.getAttribute(l).split(C),m=/([.?@])?(.*)/.exec(p);c.push({type:1,index:i,name:m[2],strings:f,ctor:m[1]==="."?Tt:m[1]==="?"?Ct:m[1]==="@"?Rt:G}),n.removeAttribute(l)}else l.startsWith(C)&&(c.push({type:6,index:i}),n.removeAttribute(l));if(Re.test(n.tagName)){let l=n.textContent.split(C),p=l.length-1;if(p>0){n.textContent=ut?ut.emptyScript:"";for(let f=0;f<p;f++)n.append(l[f],et()),I.nextNode(),c.push({type:2,index:++i});n.append(l[p],et())}}}else if(n.nodeType===8)if(n.data===Ce)c.push({type:2,index:i});else{let l=-1;for(;(l=n.data.indexOf(C,l+1))!==-1;)c.push({type:7,index:i}),l+=C.length-1}i++}}static createElement(t,e){let r=P.createElement("template");return r.innerHTML=t,r}};function K(s,t,e=s,r){if(t===N)return t;let n=r!==void 0?e._$Co?.[r]:e._$Cl,i=st(t)?void 0:t._$litDirective$;return n?.constructor!==i&&(n?._$AO?.(!1),i===void 0?n=void 0:(n=new i(s),n._$AT(s,e,r)),r!==void 0?(e._$Co??=[])[r]=n:e._$Cl=n),n!==void 0&&(t=K(s,n._$AS(s,t.values),n,r)),t}var St=class{constructor(t,e){this._$AV=[],this._$AN=void 0,this._$AD=t,this._$AM=e}get parentNode(){return this._$AM.parentNode}get _$AU(){return this._$AM._$AU}u(t){let{el:{content:e},parts:r}=this._$AD,n=(t?.creationScope??P).importNode(e,!0);I.currentNode=n;let i=I.nextNode(),o=0,d=0,c=r[0];for(;c!==void 0;){if(o===c.index){let h;c.type===2?h=new nt(i,i.nextSibling,this,t):c.type===1?h=new c.ctor(i,c.name,c.strings,this,t):c.type===6&&(h=new Lt(i,this,t)),this._$AV.push(h),c=r[++d]}o!==c?.index&&(i=I.nextNode(),o++)}return I.currentNode=P,n}p(t){let e=0;for(let r of this._$AV)r!==void 0&&(r.strings!==void 0?(r._$AI(t,r,e),e+=r.strings.length-2):r._$AI(t[e])),e++}},nt=class s{get _$AU(){return this._$AM?._$AU??this._$Cv}constructor(t,e,r,n){this.type=2,this._$AH=v,this._$AN=void 0,this._$AA=t,this._$AB=e,this._$AM=r,this.options=n,this._$Cv=n?.isConnected??!0}get parentNode(){let t=this._$AA.parentNode,e=this._$AM;return e!==void 0&&t?.nodeType===11&&(t=e.parentNode),t}get startNode(){return this._$AA}get endNode(){return this._$AB}_$AI(t,e=this){t=K(this,t,e),st(t)?t===v||t==null||t===""?(this._$AH!==v&&this._$AR(),this._$AH=v):t!==this._$AH&&t!==N&&this._(t):t._$litType$!==void 0?this.$(t):t.nodeType!==void 0?this.T(t):ks(t)?this.k(t):this._(t)}O(t){return this._$AA.parentNode.insertBefore(t,this._$AB)}T(t){this._$AH!==t&&(this._$AR(),this._$AH=this.O(t))}_(t){this._$AH!==v&&st(this._$AH)?this._$AA.nextSibling.data=t:this.T(P.createTextNode(t)),this._$AH=t}$(t){let{values:e,_$litType$:r}=t,n=typeof r=="number"?this._$AC(t):(r.el===void 0&&(r.el=rt.createElement(Le(r.h,r.h[0]),this.options)),r);if(this._$AH?._$AD===n)this._$AH.p(e);else{let i=new St(n,this),o=i.u(this.options);i.p(e),this.T(o),this._$AH=i}}_$AC(t){let e=Se.get(t.strings);return e===void 0&&Se.set(t.strings,e=new rt(t)),e}k(t){Ut(this._$AH)||(this._$AH=[],this._$AR());let e=this._$AH,r,n=0;for(let i of t)n===e.length?e.push(r=new s(this.O(et()),this.O(et()),this,this.options)):r=e[n],r._$AI(i),n++;n<e.length&&(this._$AR(r&&r._$AB.nextSibling,n),e.length=n)}_$AR(t=this._$AA.nextSibling,e){for(this._$AP?.(!1,!0,e);t!==this._$AB;){let r=ve(t).nextSibling;ve(t).remove(),t=r}}setConnected(t){this._$AM===void 0&&(this._$Cv=t,this._$AP?.(t))}},G=class{get tagName(){return this.element.tagName}get _$AU(){return this._$AM._$AU}constructor(t,e,r,n,i){this.type=1,this._$AH=v,this._$AN=void 0,this.element=t,this.name=e,this._$AM=n,this.options=i,r.length>2||r[0]!==""||r[1]!==""?(this._$AH=Array(r.length-1).fill(new String),this.strings=r):this._$AH=v}_$AI(t,e=this,r,n){let i=this.strings,o=!1;if(i===void 0)t=K(this,t,e,0),o=!st(t)||t!==this._$AH&&t!==N,o&&(this._$AH=t);else{let d=t,c,h;for(t=i[0],c=0;c<i.length-1;c++)h=K(this,d[r+c],e,c),h===N&&(h=this._$AH[c]),o||=!st(h)||h!==this._$AH[c],h===v?t=v:t!==v&&(t+=(h??"")+i[c+1]),this._$AH[c]=h}o&&!n&&this.j(t)}j(t){t===v?this.element.removeAttribute(this.name):this.element.setAttribute(this.name,t??"")}},Tt=class extends G{constructor(){super(...arguments),this.type=3}j(t){this.element[this.name]=t===v?void 0:t}},Ct=class extends G{constructor(){super(...arguments),this.type=4}j(t){this.element.toggleAttribute(this.name,!!t&&t!==v)}},Rt=class extends G{constructor(t,e,r,n,i){super(t,e,r,n,i),this.type=5}_$AI(t,e=this){if((t=K(this,t,e,0)??v)===N)return;let r=this._$AH,n=t===v&&r!==v||t.capture!==r.capture||t.once!==r.once||t.passive!==r.passive,i=t!==v&&(r===v||n);n&&this.element.removeEventListener(this.name,this,r),i&&this.element.addEventListener(this.name,this,t),this._$AH=t}handleEvent(t){typeof this._$AH=="function"?this._$AH.call(this.options?.host??this.element,t):this._$AH.handleEvent(t)}},Lt=class{constructor(t,e,r){this.element=t,this.type=6,this._$AN=void 0,this._$AM=e,this.options=r}get _$AU(){return this._$AM._$AU}_$AI(t){K(this,t)}};var Ts=Ot.litHtmlPolyfillSupport;Ts?.(rt,nt),(Ot.litHtmlVersions??=[]).push("3.3.3");var Oe=(s,t,e)=>{let r=e?.renderBefore??t,n=r._$litPart$;if(n===void 0){let i=e?.renderBefore??null;r._$litPart$=n=new nt(t.insertBefore(et(),i),i,void 0,e??{})}return n._$AI(s),n};var Ht=globalThis,L=class extends k{constructor(){super(...arguments),this.renderOptions={host:this},this._$Do=void 0}createRenderRoot(){let t=super.createRenderRoot();return this.renderOptions.renderBefore??=t.firstChild,t}update(t){let e=this.render();this.hasUpdated||(this.renderOptions.isConnected=this.isConnected),super.update(t),this._$Do=Oe(e,this.renderRoot,this.renderOptions)}connectedCallback(){super.connectedCallback(),this._$Do?.setConnected(!0)}disconnectedCallback(){super.disconnectedCallback(),this._$Do?.setConnected(!1)}render(){return N}};L._$litElement$=!0,L.finalized=!0,Ht.litElementHydrateSupport?.({LitElement:L});var Cs=Ht.litElementPolyfillSupport;Cs?.({LitElement:L});(Ht.litElementVersions??=[]).push("4.2.2");var E=class extends Error{constructor(e,r){super(e);this.status=r}},W="splitup-api-key";function D(){return sessionStorage.getItem(W)??localStorage.getItem(W)??""}function Ue(s,t){sessionStorage.removeItem(W),localStorage.removeItem(W),s&&(t?localStorage:sessionStorage).setItem(W,s)}function Me(){return localStorage.getItem(W)!==null}function Bt(){let s=D();return s?{Authorization:`Bearer ${s}`}:{}}async function He(s){if(s.ok)return s;let t=`the server answered ${s.status}`;try{t=(await s.json()).error.message??t}catch{}throw new E(t,s.status)}async function pt(s,t){let e;try{e=await fetch(s,{headers:Bt(),signal:t})}catch(r){throw t?.aborted?r:new E("the server does not answer; is splitup serve still running?",0)}return(await He(e)).json()}async function Be(s){await fetch(`/v1/streams/${s}`,{method:"DELETE",headers:Bt()})}async function*Ie(s,t,e,r){let n=await He(await fetch(s,{method:"POST",headers:{"Content-Type":"application/json",...Bt()},body:JSON.stringify({...t,stream:!0,stream_options:{include_usage:!0}}),signal:e}));r(n.headers.get("x-splitup-stream")??"");let i=n.body.pipeThrough(new TextDecoderStream).getReader(),o="";for(;;){let{value:d,done:c}=await i.read();if(c)return;o+=d;let h=o.split(`

`);o=h.pop();for(let u of h){let l=u.split(`
`).find(m=>m.startsWith("data: "))?.slice(6);if(l===void 0||l==="[DONE]")continue;let p=JSON.parse(l);if(p.error){if(yield{text:"",thought:"",finish:p.error.code==="stopped"?"stopped":null,usage:p.usage??null},p.error.code==="stopped")return;throw new E(p.error.message,502)}let f=p.choices?.[0];yield{text:f?.delta?.content??f?.text??"",thought:f?.delta?.reasoning_content??"",finish:f?.finish_reason??null,usage:p.usage??null}}}}function b(s){if(s==null)return"–";let t=s!==0&&Math.abs(s)<1e6?6:2;return`${(s/1e6).toLocaleString("en",{maximumFractionDigits:t})} USDC`}function z(s){return b(s*1e3)}function S(s){let t=["B","kB","MB","GB","TB"],e=0;for(;s>=1e3&&e<t.length-1;)s/=1e3,e+=1;return`${s.toLocaleString("en",{maximumFractionDigits:s<10?1:0})} ${t[e]}`}function T(s){return s>=1e3?`${(s/1e3).toFixed(2)} s`:`${s.toFixed(s<10?2:0)} ms`}function x(s){return s==null?"–":s.toLocaleString("en")}function It(s){return s==null?"–":`${(Math.floor(s*1e3)/10).toLocaleString("en")} %`}function X(s){return s==null?"–":new Date(s*1e3).toISOString().replace("T"," ").slice(0,19)+" UTC"}function w(s){return s.length>14?`${s.slice(0,8)}…${s.slice(-4)}`:s}function g(s,t,e=""){return t?a`<a class=${e?"":"mono"} href="#/${s}/${t}" title=${t}>${e||w(t)}</a>`:a`–`}function _(s,t){return s?a`<p class="error" role="alert">${s}</p>`:t?a`<p class="quiet" aria-busy="true">Loading …</p>`:null}var Pe=8,Rs=120;function Ne(s){if(!s.length)return a`<p class="quiet">The nodes reported no times.</p>`;let t=[...new Set(s.map(l=>l.node))].sort(),e=[...new Set(s.map(l=>l.task))].sort((l,p)=>l-p),r=new Map(s.map(l=>[l.task,l.label])),n=Math.max(...s.map(l=>l.sent_us),1),[i,o,d]=[168,760,24],c=l=>i+Math.max(0,l)/n*o,h=new Set(s.map(l=>l.step)).size,u=`${h} step${h>1?"s":""} in ${e.length} tasks on ${t.length} nodes, ${T(n/1e3)}`;return a`<figure class="chart">
    <figcaption>${u}</figcaption>
    <div class="scroll" tabindex="0" role="group" aria-label="Timeline">
      <svg viewBox="0 0 ${i+o+10} ${e.length*d+26}" role="img" aria-label=${u}>
        ${e.map((l,p)=>R`
            <text class="label" x="0" y=${p*d+16}>${je(r.get(l)??"",22)}<title>${r.get(l)}</title></text>
            <line class="grid" x1=${i} x2=${i+o} y1=${p*d+d-1} y2=${p*d+d-1}></line>`)}
        ${s.map(l=>{let p=e.indexOf(l.task)*d+4,f=`bar c${t.indexOf(l.node)%Pe}`,m=Math.max(1.2,c(l.ended_us)-c(l.started_us));return R`<rect class=${f} x=${c(l.started_us)} y=${p} width=${m} height=${d-9} rx="1.5">
            <title>${`${l.label}, step ${l.step}, node ${w(l.node)}: ${T((l.ended_us-l.started_us)/1e3)}`}</title></rect>`})}
        ${[0,.25,.5,.75,1].map(l=>R`<text class="tick" x=${i+l*o} y=${e.length*d+18}
            text-anchor=${l===1?"end":l===0?"start":"middle"}>${T(l*n/1e3)}</text>`)}
      </svg>
    </div>
    <p class="legend">${t.map((l,p)=>a`<a href="#/accounts/${l}" title=${l}><span class="dot c${p%Pe}"></span>${w(l)}</a>`)}</p>
  </figure>`}function De(s){if(!s.length)return null;let t=s.at(-1),e=900,r=`${s.length} tokens in ${T(t)}, the first after ${T(s[0])}`;return a`<figure class="chart">
    <figcaption>As seen from here: ${r}</figcaption>
    <div class="scroll">
      <svg viewBox="0 0 ${e} 20" role="img" aria-label=${r}>
        ${s.map((n,i)=>{let o=i?s[i-1]:0;return R`<rect class=${i?"bar c0":"wait"} x=${o/t*e} y="2" height="16"
            width=${Math.max(1,(n-o)/t*e-1)}><title>${`token ${i+1}: ${T(n-o)}`}</title></rect>`})}
      </svg>
    </div>
  </figure>`}function Fe(s){let t=h=>h.paid+h.rewards,e=s.reduce((h,u)=>h+t(u),0),r=Math.max(...s.map(t),1),[n,i,o]=[900,90,4],d=n/s.length,c=`${b(e)} in ${s.length} days`;return a`<figure class="chart">
      <figcaption>${c}</figcaption>
      <div class="scroll">
        <svg viewBox="0 0 ${n} ${i+18}" role="img" aria-label=${c}>
          ${s.map((h,u)=>{let l=t(h)/r*i;return R`<rect class="bar c0" x=${u*d} y=${i-l} width=${d-o} height=${l}>
                <title>${`${h.date}: ${b(t(h))}`}</title></rect>
              <text class="tick" x=${u*d} y=${i+14}>${h.date.slice(5)}</text>`})}
          <line class="grid" x1="0" x2=${n} y1=${i} y2=${i}></line>
        </svg>
      </div>
    </figure>
    <div class="scroll"><table>
      <thead><tr><th>Day</th><th class="number">Executions</th><th class="number">Paid</th><th class="number">Rewards</th>
        <th class="number">Slashed</th></tr></thead>
      <tbody>${s.filter(h=>h.executions||h.rewards||h.slashed).map(h=>a`<tr><td>${h.date}</td><td class="number">${x(h.executions)}</td>
            <td class="number">${b(h.paid)}</td><td class="number">${b(h.rewards)}</td>
            <td class="number">${b(h.slashed)}</td></tr>`)}</tbody></table></div>`}function qe(s,t){if(s.length>Rs)return null;let e=s.map(()=>0);for(let[m,$]of t)e[$]=Math.max(e[$],e[m]+1);let r=[],n=e.map(m=>(r[m]=(r[m]??0)+1)-1),i=Math.max(...r),[o,d,c,h]=[132,44,38,14],u=m=>e[m]*(o+c)+2,l=m=>(n[m]+(i-r[e[m]])/2)*(d+h)+2,p=r.length*(o+c)-c+4,f=`${s.length} tasks, ${t.length} edges`;return a`<figure class="chart">
    <div class="scroll" tabindex="0" role="group" aria-label="Graph of tasks">
      <svg class="dag" width=${p} height=${i*(d+h)+4} role="img" aria-label=${f}>
        ${t.map(([m,$])=>{let[at,he,wt,ue]=[u(m)+o,l(m)+d/2,u($),l($)+d/2],pe=Math.max((at+wt)/2,wt-c/2);return R`<path class="edge" d="M${at} ${he}C${pe} ${he} ${pe} ${ue} ${wt} ${ue}"></path>`})}
        ${s.map((m,$)=>R`<g>
            <title>${`${m.label}: ${S(m.vram_bytes)}, held by ${m.holders} nodes`}</title>
            <rect class=${m.holders?"task":"task missing"} x=${u($)} y=${l($)} width=${o} height=${d} rx="6"></rect>
            <text class="name" x=${u($)+10} y=${l($)+18}>${je(m.label,16)}</text>
            <text class="tick" x=${u($)+10} y=${l($)+34}>${S(m.vram_bytes)} · ${m.holders} nodes</text></g>`)}
      </svg>
    </div>
  </figure>`}function je(s,t){return s.length>t?`${s.slice(0,t-1)}…`:s}var O=class extends L{createRenderRoot(){return this}},y=class extends O{constructor(){super();this.period=5e3;this.timer=0;this.asOf="";this.asking=null;this.onVisible=()=>{!document.hidden&&this.period&&this.ask()};this.path="",this.data=null,this.error=""}static{this.properties={path:{},data:{state:!0},error:{state:!0}}}connectedCallback(){super.connectedCallback(),document.addEventListener("visibilitychange",this.onVisible)}disconnectedCallback(){super.disconnectedCallback(),document.removeEventListener("visibilitychange",this.onVisible),this.stop()}willUpdate(e){e.has("path")&&(this.data=null,this.error="",this.ask())}stop(){clearTimeout(this.timer),this.asking?.abort()}async ask(){if(this.stop(),!this.path)return;let e=this.asking=new AbortController;try{let r=await pt(this.path,e.signal);if(e.signal.aborted)return;this.data=r,this.asOf=new Date().toLocaleTimeString(),this.error=""}catch(r){if(e.signal.aborted)return;let n=r instanceof E&&r.status===401;this.error=r instanceof E?r.message:String(r),this.data?this.error+=`; what is shown is of ${this.asOf}`:n&&!D()&&(this.error=""),n&&this.dispatchEvent(new CustomEvent("key-needed",{bubbles:!0}))}this.period&&!document.hidden&&(this.timer=window.setTimeout(()=>{this.ask()},this.period))}};var mt=BigInt(4294967295),Ke=BigInt(32);function Ls(s,t=!1){return t?{h:Number(s&mt),l:Number(s>>Ke&mt)}:{h:Number(s>>Ke&mt)|0,l:Number(s&mt)|0}}function Ge(s,t=!1){let e=s.length,r=new Uint32Array(e),n=new Uint32Array(e);for(let i=0;i<e;i++){let{h:o,l:d}=Ls(s[i],t);[r[i],n[i]]=[o,d]}return[r,n]}var Os=s=>s/2**32|0,Us=s=>s>>>0;function We(s,t,e,r){let n=Os(e),i=Us(e);s.setUint32(t,r?i:n,r),s.setUint32(t+4,r?n:i,r)}function ze(s){return s instanceof Uint8Array||ArrayBuffer.isView(s)&&s.constructor.name==="Uint8Array"&&"BYTES_PER_ELEMENT"in s&&s.BYTES_PER_ELEMENT===1}var ft=s=>s?`"${s}" `:"";function U(s,t=""){if(typeof s!="number")throw new TypeError(ft(t)+"expected number, got "+typeof s);if(!Number.isSafeInteger(s)||s<0)throw new RangeError(ft(t)+"expected integer >= 0, got "+s);return s}function Je(s,t=""){if(typeof s!="boolean")throw new TypeError(ft(t)+"expected boolean, got type="+typeof s);return s}function M(s,t,e=""){if(ze(s)&&(t===void 0||s.length===t))return s;t!==void 0&&U(t,"length");let r=ze(s),n=t!==void 0?` of length ${t}`:"",i=r?`length=${s.length}`:`type=${typeof s}`,o=ft(e)+"expected Uint8Array"+n+", got "+i;throw r?new RangeError(o):new TypeError(o)}var Ms=(s,t)=>{if(s===null||typeof s!="object"||Array.isArray(s))throw new TypeError((t==="object"?"":`"${t}" `)+"expected object, got type="+typeof s)},Xe=(s,t)=>{Ms(s,t);let e=Object.getPrototypeOf(s);if(e!==Object.prototype&&e!==null)throw new TypeError(`"${t}" expected plain object`);if(Object.hasOwn(s,"__proto__"))throw new TypeError(`"${t}.__proto__" is not allowed`)};function Y(s,t=!0){if(s.destroyed)throw new Error("hash was destroyed");if(t&&s.finished)throw new Error("digest() was already called")}function bt(s,t){M(s,void 0,"output");let e=t.outputLen;if(!(s.length>=e))throw new RangeError('"output" expected length >= '+e)}function Pt(s){return new Uint32Array(s.buffer,s.byteOffset,Math.floor(s.byteLength/4))}function F(...s){for(let t=0;t<s.length;t++)s[t].fill(0)}function gt(s){return new DataView(s.buffer,s.byteOffset,s.byteLength)}function A(s,t){return s<<32-t|s>>>t}var Hs=new Uint8Array(new Uint32Array([287454020]).buffer)[0]===68;function Bs(s){return s<<24&4278190080|s<<8&16711680|s>>>8&65280|s>>>24&255}function Is(s){for(let t=0;t<s.length;t++)s[t]=Bs(s[t]);return s}var Nt=Hs?s=>s:Is,Qe=typeof Uint8Array.from([]).toHex=="function"&&typeof Uint8Array.fromHex=="function",Ps=Array.from({length:256},(s,t)=>t.toString(16).padStart(2,"0"));function Ze(s){if(M(s),Qe)return s.toHex();let t="";for(let e=0;e<s.length;e++)t+=Ps[s[e]];return t}function Ye(s){return s>=48&&s<=57?s-48:s>=65&&s<=70?s-55:s>=97&&s<=102?s-87:void 0}function Ve(s){if(typeof s!="string")throw new TypeError("hex string expected, got "+typeof s);if(Qe)try{return Uint8Array.fromHex(s)}catch(n){throw n instanceof SyntaxError?new RangeError(n.message):n}let t=s.length,e=t/2;if(t%2)throw new RangeError("hex string expected, got unpadded hex of length "+t);let r=new Uint8Array(e);for(let n=0,i=0;n<e;n++,i+=2){let o=Ye(s.charCodeAt(i)),d=Ye(s.charCodeAt(i+1));if(o===void 0||d===void 0){let c=s[i]+s[i+1];throw new RangeError('hex string expected, got non-hex character "'+c+'" at index '+i)}r[n]=o*16+d}return r}function xt(s){if(typeof s!="string")throw new TypeError("string expected");let t=new TextEncoder().encode(s);try{return new Uint8Array(t)}finally{F(t)}}function ts(...s){let t=0;for(let r=0;r<s.length;r++){let n=s[r];M(n),t+=n.length}let e=new Uint8Array(t);for(let r=0,n=0;r<s.length;r++){let i=s[r];e.set(i,n),n+=i.length}return e}function es(s,t,e="opts"){return Xe(s,"defaults"),t!==void 0&&Xe(t,e),Object.assign(Object.create(null),s,t)}function $t(s,t={}){if(typeof s!="function")throw new TypeError('"hashCons" expected function, got type='+typeof s);t=es({},t,"info");let e=(n,i)=>s(i).update(n).digest(),r=s(void 0);return e.outputLen=r.outputLen,e.blockLen=r.blockLen,e.canXOF=r.canXOF,e.create=n=>s(n),Object.assign(e,t),Object.freeze(e)}var Dt=s=>({oid:Uint8Array.from([6,9,96,134,72,1,101,3,4,2,s])});function ss(s,t,e){return s&t^~s&e}function rs(s,t,e){return s&t^s&e^t&e}var yt=class{blockLen;outputLen;canXOF=!1;padOffset;isLE;buffer;view;finished=!1;length=0;pos=0;destroyed=!1;constructor(t,e,r,n){this.blockLen=t,this.outputLen=e,this.padOffset=r,this.isLE=n,this.buffer=new Uint8Array(t),this.view=gt(this.buffer)}update(t){Y(this),M(t);let{view:e,buffer:r,blockLen:n}=this,i=t.length,o=!1;for(let d=0;d<i;){let c=Math.min(n-this.pos,i-d);if(c===n){let h=gt(t);for(;n<=i-d;d+=n)this.process(h,d);o=!0;continue}r.set(d===0&&c===i?t:t.subarray(d,d+c),this.pos),this.pos+=c,d+=c,this.pos===n&&(this.process(e,0),this.pos=0,o=!0)}return this.length+=t.length,o&&this.roundClean(),this}digestInto(t){Y(this),bt(t,this),this.finished=!0;let{buffer:e,view:r,blockLen:n,isLE:i}=this,{pos:o}=this;e[o++]=128,e.fill(0,o),this.padOffset>n-o&&(this.process(r,0),e.fill(0)),We(r,n-8,this.length*8,i),this.process(r,0),this.roundClean();let d=t===e?r:gt(t),c=this.outputLen,h=c/4,u=this.get();if(c%4||h>u.length)throw new Error("invalid outputLen");for(let l=0;l<h;l++)d.setUint32(4*l,u[l],i)}digest(){let{buffer:t,outputLen:e}=this;this.digestInto(t);let r=t.slice(0,e);return this.destroy(),r}_cloneIntoMeta(t){let{buffer:e,length:r,finished:n,destroyed:i,pos:o}=this;return t.destroyed=i,t.finished=n,t.length=r,t.pos=o,o&&t.buffer.set(e),t}clone(){return this._cloneInto()}},ns=Uint32Array.from([1779033703,3144134277,1013904242,2773480762,1359893119,2600822924,528734635,1541459225]);var Ns=Uint32Array.from([1116352408,1899447441,3049323471,3921009573,961987163,1508970993,2453635748,2870763221,3624381080,310598401,607225278,1426881987,1925078388,2162078206,2614888103,3248222580,3835390401,4022224774,264347078,604807628,770255983,1249150122,1555081692,1996064986,2554220882,2821834349,2952996808,3210313671,3336571891,3584528711,113926993,338241895,666307205,773529912,1294757372,1396182291,1695183700,1986661051,2177026350,2456956037,2730485921,2820302411,3259730800,3345764771,3516065817,3600352804,4094571909,275423344,430227734,506948616,659060556,883997877,958139571,1322822218,1537002063,1747873779,1955562222,2024104815,2227730452,2361852424,2428436474,2756734187,3204031479,3329325298]),H=new Uint32Array(64),Ft=class extends yt{A=0;B=0;C=0;D=0;E=0;F=0;G=0;H=0;constructor(t,e){super(64,t,8,!1),this.A=e[0]|0,this.B=e[1]|0,this.C=e[2]|0,this.D=e[3]|0,this.E=e[4]|0,this.F=e[5]|0,this.G=e[6]|0,this.H=e[7]|0}get(){let{A:t,B:e,C:r,D:n,E:i,F:o,G:d,H:c}=this;return[t,e,r,n,i,o,d,c]}set(t,e,r,n,i,o,d,c){this.A=t|0,this.B=e|0,this.C=r|0,this.D=n|0,this.E=i|0,this.F=o|0,this.G=d|0,this.H=c|0}_cloneInto(t){return(t||=new this.constructor).set(...this.get()),this._cloneIntoMeta(t)}process(t,e){for(let l=0;l<16;l++,e+=4)H[l]=t.getUint32(e,!1);for(let l=16;l<64;l++){let p=H[l-15],f=H[l-2],m=A(p,7)^A(p,18)^p>>>3,$=A(f,17)^A(f,19)^f>>>10;H[l]=$+H[l-7]+m+H[l-16]|0}let{A:r,B:n,C:i,D:o,E:d,F:c,G:h,H:u}=this;for(let l=0;l<64;l++){let p=A(d,6)^A(d,11)^A(d,25),f=u+p+ss(d,c,h)+Ns[l]+H[l]|0,$=(A(r,2)^A(r,13)^A(r,22))+rs(r,n,i)|0;u=h,h=c,c=d,d=o+f|0,o=i,i=n,n=r,r=f+$|0}r=r+this.A|0,n=n+this.B|0,i=i+this.C|0,o=o+this.D|0,d=d+this.E|0,c=c+this.F|0,h=h+this.G|0,u=u+this.H|0,this.set(r,n,i,o,d,c,h,u)}roundClean(){F(H)}destroy(){this.destroyed=!0,this.set(0,0,0,0,0,0,0,0),F(this.buffer)}},qt=class extends Ft{constructor(){super(32,ns)}};var jt=$t(()=>new qt,Dt(1));var Ds=BigInt(0),it=BigInt(1),Fs=BigInt(2),qs=BigInt(7),js=BigInt(256),Ks=BigInt(113),as=[],ls=[],cs=[];for(let s=0,t=it,e=1,r=0;s<24;s++){[e,r]=[r,(2*e+3*r)%5],as.push(2*(5*r+e)),ls.push((s+1)*(s+2)/2%64);let n=Ds;for(let i=0;i<7;i++)t=(t<<it^(t>>qs)*Ks)%js,t&Fs&&(n^=it<<(it<<BigInt(i))-it);cs.push(n)}var ds=Ge(cs,!0),Gs=ds[0],Ws=ds[1],zs=(s,t,e)=>s<<e|t>>>32-e,Xs=(s,t,e)=>t<<e|s>>>32-e,Ys=(s,t,e)=>t<<e-32|s>>>64-e,Js=(s,t,e)=>s<<e-32|t>>>64-e,is=(s,t,e)=>e>32?Ys(s,t,e):zs(s,t,e),os=(s,t,e)=>e>32?Js(s,t,e):Xs(s,t,e),J=new Uint32Array(10);function Qs(s,t=24){if(!(s instanceof Uint32Array))throw new TypeError('"s" expected Uint32Array(50), got type='+typeof s);if(s.length!==50)throw new RangeError('"s" expected Uint32Array(50), got length='+s.length);if(U(t,"rounds"),t<1||t>24)throw new Error('"rounds" expected integer 1..24');for(let e=24-t;e<24;e++){for(let i=0;i<10;i++)J[i]=s[i]^s[i+10]^s[i+20]^s[i+30]^s[i+40];for(let i=0;i<10;i+=2){let o=(i+8)%10,d=(i+2)%10,c=J[d],h=J[d+1],u=is(c,h,1)^J[o],l=os(c,h,1)^J[o+1];for(let p=0;p<50;p+=10)s[i+p]^=u,s[i+p+1]^=l}let r=s[2],n=s[3];for(let i=0;i<24;i++){let o=ls[i],d=is(r,n,o),c=os(r,n,o),h=as[i];r=s[h],n=s[h+1],s[h]=d,s[h+1]=c}for(let i=0;i<50;i+=10){let o=s[i],d=s[i+1],c=s[i+2],h=s[i+3];s[i]^=~s[i+2]&s[i+4],s[i+1]^=~s[i+3]&s[i+5],s[i+2]^=~s[i+4]&s[i+6],s[i+3]^=~s[i+5]&s[i+7],s[i+4]^=~s[i+6]&s[i+8],s[i+5]^=~s[i+7]&s[i+9],s[i+6]^=~s[i+8]&o,s[i+7]^=~s[i+9]&d,s[i+8]^=~o&c,s[i+9]^=~d&h}s[0]^=Gs[e],s[1]^=Ws[e]}F(J)}var Kt=class s{state;pos=0;posOut=0;finished=!1;state32;destroyed=!1;blockLen;suffix;outputLen;canXOF;enableXOF=!1;rounds;constructor(t,e,r,n=!1,i=24){if(U(t,"blockLen"),U(e,"suffix"),U(i,"rounds"),Je(n,"enableXOF"),this.blockLen=t,this.suffix=e,this.outputLen=r,this.enableXOF=n,this.canXOF=n,this.rounds=i,U(r,"outputLen"),!(0<t&&t<200))throw new Error('"blockLen" must be 1..199');this.state=new Uint8Array(200),this.state32=Pt(this.state)}clone(){return this._cloneInto()}keccak(){Nt(this.state32),Qs(this.state32,this.rounds),Nt(this.state32),this.posOut=0,this.pos=0}update(t){Y(this),M(t);let{blockLen:e,state:r,state32:n}=this,i=t.length,o=e%4===0&&t.byteOffset%4===0,d=e/4,c=o&&i>=e?Pt(t):void 0;for(let h=0;h<i;){if(c!==void 0&&this.pos===0&&h%4===0&&i-h>=e){for(let l=0,p=h/4;l<d;l++)n[l]^=c[p+l];h+=e,this.pos=e,this.keccak();continue}let u=Math.min(e-this.pos,i-h);for(let l=0;l<u;l++)r[this.pos++]^=t[h++];this.pos===e&&this.keccak()}return this}finish(){if(this.finished)return;this.finished=!0;let{state:t,suffix:e,pos:r,blockLen:n}=this;t[r]^=e,(e&128)!==0&&r===n-1&&this.keccak(),t[n-1]^=128,this.keccak()}writeInto(t){Y(this,!1),M(t),this.finish();let e=this.state,{blockLen:r}=this;for(let n=0,i=t.length;n<i;){this.posOut>=r&&this.keccak();let o=Math.min(r-this.posOut,i-n);t.set(e.subarray(this.posOut,this.posOut+o),n),this.posOut+=o,n+=o}return t}xofInto(t){if(!this.enableXOF)throw new Error("XOF is not enabled");return this.writeInto(t)}xof(t){return U(t),this.xofInto(new Uint8Array(t))}digestInto(t){if(bt(t,this),this.finished)throw new Error("digest() was already called");this.writeInto(t.length===this.outputLen?t:t.subarray(0,this.outputLen)),this.destroy()}digest(){let t=new Uint8Array(this.outputLen);return this.digestInto(t),t}destroy(){this.destroyed=!0,F(this.state)}_cloneInto(t){let{blockLen:e,suffix:r,outputLen:n,rounds:i,enableXOF:o}=this;return t||=new s(e,r,n,o,i),t.blockLen=e,t.state32.set(this.state32),t.pos=this.pos,t.posOut=this.posOut,t.finished=this.finished,t.rounds=i,t.suffix=r,t.outputLen=n,t.enableXOF=o,t.canXOF=this.canXOF,t.destroyed=this.destroyed,t}},Zs=(s,t,e,r={})=>$t(()=>new Kt(t,s,e),r);var Gt=Zs(1,136,32);var Vs=Gt(xt("splitup/plan/v2")),tr=Gt(xt("splitup/plan-task/v3")),Wt=new Uint8Array(32);function hs(s){let t=[s.request_hash,s.execution_id,s.model_id,s.snapshot_root,s.seed].map(Z),e=Q(Vs,...t,sr(s),q(s.tasks.length),rr(s.tasks.map(er)));return`0x${Ze(e)}`}function us(s){return s.tasks.map((t,e)=>t.candidates[s.places[e]??0])}function er(s,t){let e=s.terms,r=e?[Z(e.task_id),...[e.flops,e.weights_bytes,e.input_bytes,e.ready_ms].map(q),q(Number(e.crosses_classes))]:Array(6).fill(Wt);return Q(tr,q(t),...r,q(Number(s.verifiable)),Q(...s.candidates.map(Z)))}function sr(s){let t=s.nodes.map(e=>Q(Z(e.node),Z(e.signing_key),jt(xt(e.endpoint)),q(e.exposure)));return Q(...t,...s.places.map(q))}function rr(s){if(!s.length)return Wt;let t=s;for(;t.length>1;){let e=[];for(let r=0;r<t.length;r+=2)e.push(Q(t[r],t[r+1]??Wt));t=e}return t[0]}function Q(...s){return jt(ts(...s))}function Z(s){return Ve(s.replace(/^0x/,"").padStart(64,"0"))}function q(s){return Z(s.toString(16))}function nr(s,t){let{opening:e}=s,r=hs(e);if(r!==t.root)return`its root is ${r}, and the chain has ${t.root}`;if(e.execution_id!==t.execution)return"it is the plan of another execution";if(e.seed!==s.seed)return"it follows from another seed";let n=us(e),i=(d,c)=>{let h=e.tasks[c].candidates.filter(u=>u!==n[c]);return d.executor===n[c]&&d.fallbacks.join()===h.join()};return s.tasks.length===n.length&&s.tasks.every(i)?"":"the table shows other nodes than the plan"}var zt=class extends y{constructor(){super(...arguments);this.period=0}static{this.properties={...y.properties,brief:{type:Boolean},accepted:{}}}proof(e){let r=nr(e,this.accepted);return r?a`<p class="error" role="alert">This plan is not the one on chain: ${r}</p>`:a`<p class="proof"><span class="badge good">root matches</span> This browser computed the root of the table
      below, and it is the one on chain. <span class="quiet">The chain's root was read by this server, from the event
      PlanAccepted in block ${x(this.accepted.block)}, transaction
      <span class="mono" title=${this.accepted.transaction}>${w(this.accepted.transaction)}</span>; to trust nobody,
      compare it with a chain node of your own.</span></p>`}render(){let e=this.data;return e?a`
      ${e.difference?a`<p class="error">This plan is wrong: ${e.difference}</p>`:a`<p><span class="badge good">checked</span> Signed by ${e.signers.length} members; every choice
              follows from the seed, as this server computed it again.</p>`}
      ${this.proof(e)}
      <div class="scroll"><table>
        <thead><tr><th>Task</th><th>Computed by</th>
          ${this.brief?null:a`<th>Fallbacks</th>`}<th>Verifiable</th></tr></thead>
        <tbody>${e.tasks.map(r=>a`<tr>
            <td>${r.label}</td>
            <td>${g("accounts",r.executor)}</td>
            ${this.brief?null:a`<td>${r.fallbacks.map(n=>a`${g("accounts",n)} `)}</td>`}
            <td>${r.verifiable?"yes":"no"}</td>
          </tr>`)}</tbody>
      </table></div>
      <dl>
        <dt>Root</dt><dd class="mono">${e.root}</dd>
        <dt>Seed</dt><dd class="mono">${e.seed}</dd>
        <dt>List of nodes</dt><dd>number ${e.snapshot}</dd>
      </dl>`:_(this.error,!0)}},Xt=class extends y{constructor(){super(...arguments);this.period=0}render(){let e=this.data;return e?e.verdicts.length?a`<p>${x(e.verdicts.length)} of the tasks ${e.verdicts.length===1?"was":"were"} drawn after all results were committed.</p>
      <div class="scroll"><table>
        <thead><tr><th>Task</th><th>Verdict</th><th>Recomputed by</th><th>At fault</th></tr></thead>
        <tbody>${e.verdicts.map(r=>a`<tr>
            <td>${r.task}</td>
            <td><span class="badge ${r.outcome==="honest"?"good":"bad"}">${r.outcome}</span></td>
            <td>${r.validators.map(n=>a`${g("accounts",n)} `)}</td>
            <td>${[...r.liars,...r.silent].map(n=>a`${g("accounts",n)} `)}</td>
          </tr>`)}</tbody>
      </table></div>`:a`<p>No task of this execution was drawn.</p>`:_(this.error,!0)}},Yt=class extends y{render(){return this.data?this.data.is_known?(this.period=0,Ne(this.data.spans)):a`<p class="quiet">Nodes report their times to the client when an execution ends. This one is open, or
      another client's.</p>`:_(this.error,!0)}},Jt=class extends y{constructor(){super(...arguments);this.period=0}render(){let e=this.data;return e?a`<p>${e.is_complete?"":"At least "}${x(e.total)} gas in
        ${x(e.transactions.length)} transactions. <span class="quiet">One that serves several executions counts for
        each.</span></p>
      <div class="scroll"><table>
        <thead><tr><th>Transaction</th><th>Events</th><th class="number">Gas</th></tr></thead>
        <tbody>${e.transactions.map(r=>a`<tr><td class="mono" title=${r.transaction}>${w(r.transaction)}</td>
            <td>${[...new Set(r.events)].join(", ")}</td><td class="number">${x(r.gas)}</td></tr>`)}</tbody></table></div>`:_(this.error,!0)}};function ir(s){return s?a`
    <dl>
      <dt>Closed</dt><dd>${s.status}, ${x(s.steps)} steps</dd>
      <dt>To the nodes</dt><dd>${b(s.paid_micro_usdc)}</dd>
      <dt>Committee's fee</dt><dd>${b(s.fee_micro_usdc)}</dd>
      <dt>Came back</dt><dd>${b(s.refunded_micro_usdc)}</dd>
      <dt>Transaction</dt><dd class="mono">${s.transaction}</dd>
    </dl>
    ${s.payments.length||s.slashes.length?a`<div class="scroll"><table>
          <thead><tr><th>Account</th><th class="number">Amount</th><th>Why</th></tr></thead>
          <tbody>
            ${s.payments.map(t=>a`<tr><td>${g("accounts",t.account)}</td>
                <td class="number">${b(t.amount_micro_usdc)}</td>
                <td>${t.from_slash?"reward out of a slashed stake":"work"}</td></tr>`)}
            ${s.slashes.map(([t,e])=>a`<tr><td>${g("accounts",t)}</td>
                <td class="number bad">−${b(e)}</td><td>slashed</td></tr>`)}
          </tbody>
        </table></div>`:null}`:a`<p class="quiet">Not settled yet. An execution that serves a chat stays open for further requests; it
      is paid when it ends.</p>`}var Qt=class extends y{static{this.properties={...y.properties,execution:{},firstStep:{type:Number},brief:{type:Boolean}}}constructor(){super(),this.execution="",this.firstStep=0,this.brief=!1}willUpdate(t){t.has("execution")&&(t.set("path",this.path),this.path=`/explorer/v1/executions/${this.execution}`),super.willUpdate(t)}render(){let t=this.data;if(!t)return _(this.error,!0);let e=`/explorer/v1/executions/${this.execution}`,r=t.events.find(i=>i.name==="PlanAccepted"),n=r?{execution:t.id,root:t.plan_root,block:r.block,transaction:r.transaction}:null;return a`
      ${this.brief?null:a`<h1>Execution <span class="mono">${w(t.id)}</span></h1>`}
      <dl>
        <dt>Execution</dt><dd class="mono">${this.brief?g("executions",t.id):t.id}</dd>
        <dt>State</dt><dd><span class="badge ${Zt(t.state)}">${t.state}</span></dd>
        ${this.brief?null:a`<dt>Model</dt><dd>${g("models",t.model_id,t.model)}</dd>
              <dt>Client</dt><dd>${g("accounts",t.client)}</dd>
              <dt>Requested</dt><dd>${X(t.time)}, block ${t.block}</dd>
              <dt>Steps</dt><dd>at most ${x(t.steps)}, for at most ${b(t.max_price)}</dd>
              <dt>Deadline</dt><dd>${X(t.deadline)}</dd>`}
      </dl>
      <h2>Plan</h2>
      ${n?a`<plan-view ?brief=${this.brief} .accepted=${n} .path=${`${e}/plan`}></plan-view>`:a`<p class="quiet">Not planned yet.</p>`}
      <h2>Timeline</h2>
      <timeline-view .path=${`${e}/timeline?start=${this.firstStep}`}></timeline-view>
      <h2>Verification</h2>
      ${t.receipt?.status==="settled"?a`<verification-view .path=${`${e}/verification`}></verification-view>`:a`<p class="quiet">${t.receipt?"It was refunded: nothing was verified.":"It comes with the settlement."}</p>`}
      <h2>Receipt</h2>
      ${ir(t.receipt)}
      ${this.brief?null:a`<h2>Stakes at risk</h2>
            ${t.exposures.length?a`<div class="scroll"><table><thead><tr><th>Node</th><th class="number">Locked</th></tr></thead>
                  <tbody>${t.exposures.map(([i,o])=>a`<tr><td>${g("accounts",i)}</td><td class="number">${b(o)}</td></tr>`)}</tbody></table></div>`:a`<p class="quiet">No commitments yet.</p>`}
            <h2>Gas</h2>
            <gas-view .path=${`${e}/gas`}></gas-view>
            <h2>On chain</h2>
            ${vt(t.events)}`}`}};function Zt(s){return{settled:"good",refunded:"bad"}[s]??""}function vt(s){return a`<div class="scroll"><table>
    <thead><tr><th>Event</th><th>Time</th><th class="number">Block</th><th>Execution</th><th>Transaction</th></tr></thead>
    <tbody>${s.map(t=>a`<tr>
        <td>${t.name}${t.amount===null?"":a` <span class="quiet">${b(t.amount)}</span>`}</td>
        <td>${X(t.time)}</td>
        <td class="number">${t.block}</td>
        <td>${t.execution?g("executions",t.execution):""}</td>
        <td class="mono" title=${t.transaction}>${w(t.transaction)}</td>
      </tr>`)}</tbody></table></div>`}customElements.define("plan-view",zt);customElements.define("verification-view",Xt);customElements.define("gas-view",Jt);customElements.define("timeline-view",Yt);customElements.define("execution-view",Qt);var or=["image/png","image/jpeg","image/webp"];async function ps(s){let t;try{t=await createImageBitmap(s)}catch{throw new Error(`${s.name||"This"} is no image that this browser can read`)}if(s.size<=262144&&or.includes(s.type))return ar(s);let e=Math.min(1,1280/Math.max(t.width,t.height)),r=document.createElement("canvas");r.width=Math.max(1,Math.round(t.width*e)),r.height=Math.max(1,Math.round(t.height*e));let n=r.getContext("2d");return n.fillStyle="#fff",n.fillRect(0,0,r.width,r.height),n.drawImage(t,0,0,r.width,r.height),r.toDataURL("image/jpeg",.9)}function ar(s){return new Promise((t,e)=>{let r=new FileReader;r.onload=()=>t(r.result),r.onerror=()=>e(new Error(`${s.name} cannot be read`)),r.readAsDataURL(s)})}var lr={model:"",mode:"chat",system:"",temperature:.7,top_p:1,max_tokens:"",seed:""},fs=64;function Vt(s,t,e,r){return{role:s,given:t,thought:"",text:e,images:r,usage:null,arrivals:[],finish:null,error:""}}function _t(s){return s.takes_turns||s.takes_images}var ot=class extends O{constructor(){super();this.stream="";this.models=null,this.messages=[],this.settings={...lr},this.images=[],this.imageError="",this.error="",this.running=null}static{this.properties={models:{state:!0},messages:{state:!0},settings:{state:!0},images:{state:!0},imageError:{state:!0},error:{state:!0},running:{state:!0}}}connectedCallback(){super.connectedCallback(),this.load()}async load(){try{let e=await pt("/v1/models");this.models=e.data.filter(({kind:r})=>r==="text-generation"),this.error="",this.model||this.set("model",(this.models.find(_t)??this.models[0])?.id??"")}catch(e){let r=e instanceof E&&e.status===401;this.error=r&&!D()?"":String(e.message),r&&this.dispatchEvent(new CustomEvent("key-needed",{bubbles:!0}))}}get model(){return this.models?.find(e=>e.id===this.settings.model)}get mode(){return this.model&&!_t(this.model)?"text":this.settings.mode}get price(){return this.model?.price_nano_usdc_per_step??0}get takesImages(){return this.mode==="chat"&&(this.model?.takes_images??!1)}get cost(){return this.messages.reduce((e,r)=>e+this.costOf(r),0)}costOf(e){return e.usage?.splitup.cost_micro_usdc??Math.ceil(e.arrivals.length*this.price/1e3)}makeBody(){let{model:e,system:r,temperature:n,top_p:i,max_tokens:o,seed:d}=this.settings,{given:c}=this.messages.at(-1),h=Object.entries({max_tokens:o||c&&fs,seed:d}).filter(([,f])=>f!==""),u={model:e,temperature:n,top_p:i,...Object.fromEntries(h.map(([f,m])=>[f,Number(m)]))};if(c)return["/v1/completions",{...u,prompt:c}];let p=this.messages.slice(0,-1).filter(f=>!f.error&&!f.given).map(({role:f,text:m,images:$})=>({role:f,content:$.length?[...$.map(at=>({type:"image_url",image_url:{url:at}})),{type:"text",text:m}]:m}));return r&&p.unshift({role:"system",content:r}),["/v1/chat/completions",{...u,messages:p}]}send(e){e.preventDefault();let r=this.querySelector("#prompt"),n=r.value,i=this.takesImages?this.images:[];if(!(n.trim()||i.length)||this.running)return;r.value="",this.images=[],this.imageError="";let o=Vt("assistant","","",[]);this.mode==="chat"?this.ask(o,Vt("user","",n,i)):this.ask({...o,given:n})}async ask(e,...r){this.messages=[...this.messages,...r,e];let n=this.running=new AbortController,i=performance.now();try{let[o,d]=this.makeBody();for await(let c of Ie(o,d,n.signal,h=>this.stream=h))(c.text||c.thought)&&e.arrivals.push(performance.now()-i),e.thought+=c.thought,e.text+=c.text,e.finish=c.finish??e.finish,e.usage=c.usage??e.usage,this.follow()}catch(o){n.signal.aborted?e.finish="stopped":e.error=o.message,o instanceof E&&o.status===401&&this.dispatchEvent(new CustomEvent("key-needed",{bubbles:!0}))}finally{this.running=null,this.stream="",this.follow(),this.querySelector("#prompt")?.focus()}}stop(){this.stream?Be(this.stream).catch(()=>this.running?.abort()):this.running?.abort()}async addImages(e){this.imageError="";for(let r of e)try{let n=await ps(r);if(this.messages.reduce((o,d)=>o+d.images.length,0)+this.images.length>=16)throw new Error(`A conversation has at most ${16} images`);this.images=[...this.images,n]}catch(n){this.imageError=n.message}}takeFiles(e,r){!this.takesImages||!r?.files.length||(e.preventDefault(),this.addImages([...r.files]))}follow(){let e=this.querySelector(".messages"),r=e.scrollHeight-e.scrollTop-e.clientHeight<60;this.messages=[...this.messages],r&&this.updateComplete.then(()=>e.scrollTop=e.scrollHeight)}set(e,r){this.settings={...this.settings,[e]:r}}optionalField(e,r,n){return a`<label>${r}
      <input type="number" min="0" placeholder=${n} .value=${this.settings[e]}
        @change=${i=>this.set(e,i.target.value)}></label>`}numberField(e,r,n,i){return a`<label>${r}
      <input type="number" min="0" max=${n} step=${i} .value=${String(this.settings[e])}
        @change=${o=>this.set(e,Number(o.target.value))}></label>`}form(){let{settings:e,model:r,mode:n}=this;return a`
      <label class="wide">Model
        <select @change=${i=>this.set("model",i.target.value)}>
          ${this.models?.map(i=>a`<option ?selected=${i.id===e.model} value=${i.id}>${i.id}</option>`)}
        </select></label>
      <label class="wide">Form
        <select @change=${i=>this.set("mode",i.target.value)}>
          <option value="chat" ?disabled=${r&&!_t(r)} ?selected=${n==="chat"}>Conversation</option>
          <option value="text" ?selected=${n==="text"}>Continue a text</option>
        </select></label>
      ${n==="chat"?a`<label class="wide">System prompt
              <textarea rows="3" .value=${e.system}
                @change=${i=>this.set("system",i.target.value)}></textarea></label>`:null}
      ${this.optionalField("max_tokens","Most tokens",n==="text"?String(fs):"what fits")}
      ${this.optionalField("seed","Seed","random")}
      ${this.numberField("temperature","Temperature",2,.1)}
      ${this.numberField("top_p","Top p",1,.05)}
      ${this.model?a`<p class="quiet wide">${z(this.price)} per million steps</p>`:null}`}answer(e){let{usage:r,arrivals:n}=e,i=this.running!==null&&e===this.messages.at(-1),o=n.length>1?(n.at(-1)-n[0])/1e3:0,d=o>0?`${((n.length-1)/o).toFixed(1)} tokens/s`:"";return a`<article class="message assistant">
      ${e.thought?a`<details ?open=${i&&!e.text}><summary>What the model thought</summary>
              <div class="text given">${e.thought}</div></details>`:null}
      <div class="text" aria-busy=${i}>${e.given?a`<span class="given">${e.given}</span>${e.text}`:e.text.trimStart()}${i?a`<span class="cursor"></span>`:null}</div>
      ${e.error?a`<p class="error" role="alert">${e.error}</p>`:null}
      <p class="facts quiet">
        ${[r?`${x(r.completion_tokens)} tokens`:`${n.length} tokens`,`${r?"":"≈ "}${b(this.costOf(e))}`,n.length?`first after ${T(n[0])}`:"",d,{length:"cut at the limit",stopped:"stopped"}[e.finish??""]??""].filter(Boolean).join(" · ")}
        ${e.given&&!i&&["length","stopped"].includes(e.finish??"")?a`· <button class="plain" ?disabled=${this.running!==null}
                @click=${()=>{this.ask(Vt("assistant",e.given+e.text,"",[]))}}>Go on</button>`:null}
      </p>
      ${e.usage&&!i?a`<details @toggle=${()=>this.requestUpdate()}>
              <summary>Who computed this?</summary>
              ${this.proof(e)}
            </details>`:null}
    </article>`}proof(e){let r=e.usage?.splitup;return a`${De(e.arrivals)}${(r?.executions??[]).map((n,i)=>a`<lazy-proof .execution=${n} .firstStep=${i?0:r?.first_step??0}></lazy-proof>`)}`}attachments(){return this.takesImages?a`
      ${this.imageError?a`<p class="error" role="alert">${this.imageError}</p>`:null}
      ${this.images.length?a`<ul class="images" aria-label="Images of this message">
              ${this.images.map((e,r)=>a`<li><img src=${e} alt=${`Image ${r+1}`}>
                  <button type="button" aria-label=${`Remove image ${r+1}`}
                    @click=${()=>this.images=this.images.filter((n,i)=>i!==r)}>×</button></li>`)}
            </ul>`:null}`:null}imageButton(){return this.takesImages?a`<label class="button" title="Add images">
      <input type="file" accept="image/*" multiple aria-label="Add images"
        @change=${e=>{let r=e.target,n=[...r.files];r.value="",this.addImages(n)}}><span aria-hidden="true">+ Image</span></label>`:null}render(){let e=this.models&&!this.models.length,r=this.mode==="text";return a`
      <div class="chat">
        <details class="settings" ?open=${matchMedia("(min-width: 60rem)").matches}>
          <summary>Settings</summary><div class="form">${this.form()}</div>
        </details>
        <section class="talk">
          <div class="messages" role="log" aria-label="Conversation" tabindex="0">
            ${this.error?a`<p class="error" role="alert">${this.error}</p>`:null}
            ${e?a`<p class="quiet">This key may use no model.</p>`:null}
            ${this.messages.length?null:a`<div class="welcome">
              <h1>${r?"Begin a text":"Ask the network"}</h1>
              ${r?a`<p>This model continues what you write${this.model&&!_t(this.model)?"; it answers no questions":""}.</p>`:null}
              <p class="quiet">Each answer is computed by several nodes, paid from this server's account, and verified.</p></div>`}
            ${this.messages.map(n=>n.role==="user"?a`<article class="message user"><div class="text">${n.images.map((i,o)=>a`<img src=${i} alt=${`Image ${o+1}`}>`)}${n.text}</div></article>`:this.answer(n))}
          </div>
          ${this.attachments()}
          <form @submit=${this.send} @dragover=${n=>this.takesImages&&n.preventDefault()}
            @drop=${n=>this.takeFiles(n,n.dataTransfer)}>
            ${this.imageButton()}
            <textarea id="prompt" rows="2" placeholder=${r?"Write how a text begins":"Write a message"}
              aria-label=${r?"Beginning of a text":"Message"}
              @paste=${n=>this.takeFiles(n,n.clipboardData)}
              @keydown=${n=>{n.key==="Enter"&&!n.shiftKey&&!n.isComposing&&this.send(n)}}></textarea>
            ${this.running?a`<button type="button" class="stop" @click=${()=>this.stop()}>Stop</button>`:a`<button type="submit" class="primary" ?disabled=${!this.settings.model}>${r?"Continue":"Send"}</button>`}
          </form>
          <p class="facts quiet">
            <span>Cost so far: <output id="cost">${b(this.cost)}</output></span>
            <button class="plain" ?disabled=${!this.messages.length||this.running!==null}
              @click=${()=>this.messages=[]}>${r?"Clear":"New conversation"}</button>
          </p>
        </section>
      </div>`}},te=class extends O{static{this.properties={execution:{},firstStep:{type:Number},isOpen:{state:!0}}}connectedCallback(){super.connectedCallback();let t=this.closest("details");t.addEventListener("toggle",()=>this.isOpen=t.open),this.isOpen=t.open}render(){return this.isOpen?a`<execution-view brief .execution=${this.execution} .firstStep=${this.firstStep}></execution-view>`:null}};customElements.define("lazy-proof",te);customElements.define("chat-view",ot);var j=class extends y{constructor(){super();this.cursor="before";this.base="",this.place=[]}static{this.properties={...y.properties,base:{},place:{state:!0}}}willUpdate(e){if(e.has("base")&&(this.place=[]),e.has("base")||e.has("place")){let r=this.place.at(-1),n=this.base.includes("?")?"&":"?",i=r===void 0?this.base:`${this.base}${n}${this.cursor}=${r}`;i!==this.path&&e.set("path",this.path),this.path=i}super.willUpdate(e)}turner(){let e=this.data?.next;return!this.place.length&&e==null?null:a`<p class="turner">
      <button ?disabled=${!this.place.length} @click=${()=>this.place=this.place.slice(0,-1)}>Newer</button>
      <button ?disabled=${e==null} @click=${()=>this.place=[...this.place,e]}>Older</button>
    </p>`}},ee=class extends j{constructor(){super(...arguments);this.cursor="start";this.search=""}render(){let e=this.data;return a`
      <h1>Live nodes</h1>
      <p><input type="search" placeholder="Address, class, operator or endpoint" aria-label="Filter nodes" .value=${this.search}
        @change=${r=>{this.search=r.target.value,this.base=`/explorer/v1/nodes?search=${encodeURIComponent(this.search)}`}}></p>
      ${_(this.error,!e)}
      ${e?a`<p class="quiet">${x(e.total)} ${e.total===1?"node":"nodes"} in the committee's list number ${x(e.sequence)}</p>
            <div class="scroll"><table>
              <thead><tr><th>Node</th><th>Operator</th><th>Class</th><th class="number">Tasks</th>
                <th class="number">Free memory</th><th class="number">Queue</th><th class="number">Uptime</th><th class="number">Stake</th><th class="number">Locked</th></tr></thead>
              <tbody>${e.nodes.map(r=>a`<tr>
                  <td>${g("accounts",r.address)}</td>
                  <td>${r.operator===r.address?a`<span class="quiet">itself</span>`:g("accounts",r.operator)}</td>
                  <td class="class" title=${r.class}>${r.class}</td>
                  <td class="number">${r.task_count}</td>
                  <td class="number">${S(r.vram_free_bytes)}</td>
                  <td class="number">${x(r.queue_ms)} ms</td>
                  <td class="number">${It(r.uptime)}</td>
                  <td class="number">${b(r.stake)}</td>
                  <td class="number">${b(r.locked)}</td>
                </tr>`)}</tbody></table></div>
              <p class="quiet">Uptime: how often a node was on the list when this server looked, in the last 24 hours and
                since it was started.</p>${this.turner()}`:null}`}},se=class extends j{render(){let t=this.data;return a`<h1>Models</h1>
      ${_(this.error,!t)}
      ${t?a`<div class="scroll"><table>
              <thead><tr><th>Name</th><th>Id</th><th>Developer</th><th class="number">Tasks</th><th class="number">Memory</th>
                <th class="number">Price per million steps</th><th class="number">Holders</th></tr></thead>
              <tbody>${t.models.map(e=>a`<tr>
                  <td>${g("models",e.id,e.name)}</td>
                  <td>${g("models",e.id)}</td>
                  <td>${g("accounts",e.developer)}</td>
                  <td class="number">${e.task_count}</td>
                  <td class="number">${S(e.vram_bytes)}</td>
                  <td class="number">${z(e.price_nano_usdc)}</td>
                  <td class="number">${e.least_holders}</td>
                </tr>`)}</tbody></table></div>
              <p class="quiet">Holders: live nodes that hold the task that fewest hold.</p>${this.turner()}`:null}`}},re=class extends y{render(){let t=this.data;return t?a`${_(this.error,!1)}
      <h1>${t.name} ${t.is_retired?a`<span class="badge bad">retired</span>`:null}</h1>
      <dl>
        <dt>Id</dt><dd class="mono">${t.id}</dd>
        <dt>Developer</dt><dd>${g("accounts",t.developer)}</dd>
        <dt>Price</dt><dd>${z(t.price_nano_usdc)} per million steps</dd>
        <dt>Memory</dt><dd>${S(t.vram_bytes)} in ${x(t.task_count)} tasks</dd>
        <dt>Executions</dt><dd>${x(t.requests)}, which cost ${b(t.revenue)}</dd>
      </dl>
      <h2>Tasks</h2>
      ${qe(t.tasks,t.edges)}
      <div class="scroll"><table>
        <thead><tr><th>Task</th><th>Id</th><th class="number">Memory</th><th class="number">Operations</th>
          <th class="number">Price per million steps</th><th class="number">Holders</th></tr></thead>
        <tbody>${t.tasks.map(e=>a`<tr>
            <td>${e.label}</td><td class="mono" title=${e.id}>${w(e.id)}</td>
            <td class="number">${S(e.vram_bytes)}</td><td class="number">${x(e.flops)}</td>
            <td class="number">${z(e.price_nano_usdc)}</td>
            <td class="number">${e.holders||a`<span class="badge bad">0</span>`}</td>
          </tr>`)}</tbody></table></div>
      <h2>Executions</h2>
      <executions-view embedded .base=${`/explorer/v1/executions?of=${t.id}`}></executions-view>`:_(this.error,!0)}},ne=class extends j{static{this.properties={...j.properties,embedded:{type:Boolean}}}render(){let t=this.data;return a`${this.embedded?null:a`<h1>Executions</h1>`}
      ${_(this.error,!t)}
      ${t&&!t.executions.length?a`<p class="quiet">None yet.</p>`:null}
      ${t?.executions.length?a`<div class="scroll"><table>
              <thead><tr><th>Execution</th><th>Requested</th><th>Model</th><th>Client</th><th>State</th>
                <th class="number">Steps</th><th class="number">Locked</th><th class="number">Cost</th></tr></thead>
              <tbody>${t.executions.map(e=>a`<tr>
                  <td>${g("executions",e.id)}</td>
                  <td title="block ${e.block}">${X(e.time)}</td>
                  <td>${g("models",e.model_id,e.model)}</td>
                  <td>${g("accounts",e.client)}</td>
                  <td><span class="badge ${Zt(e.state)}">${e.state}</span></td>
                  <td class="number">${x(e.steps)}</td>
                  <td class="number">${b(e.max_price)}</td>
                  <td class="number">${b(e.cost)}</td>
                </tr>`)}</tbody></table></div>${this.turner()}`:null}`}},cr={payout:"Earned by work",reward:"Rewards out of slashes",slashed:"Slashed",refund:"Refunded",executor:"Executions computed",client:"Requests, deposits and withdrawals",developer:"Models registered",member:"Committees",operator:"Nodes operated"},ie=class extends j{render(){let t=this.data;if(!t)return _(this.error,!0);let e=t.node;return a`${_(this.error,!1)}
      <h1>Account <span class="mono">${w(t.address)}</span></h1>
      <dl>
        <dt>Address</dt><dd class="mono">${t.address}</dd>
        ${Object.entries(cr).filter(([r])=>r in t.totals).map(([r,n])=>{let i=t.totals[r],o=["payout","reward","slashed","refund"].includes(r);return a`<dt>${n}</dt><dd>${o?a`${b(i.amount)} <span class="quiet">in ${x(i.count)}</span>`:x(i.count)}</dd>`})}
      </dl>
      ${e?a`<h2>Node <span class="badge ${e.live?"good":"bad"}">${e.live?"live":"not live"}</span></h2>
            <dl>
              <dt>Stake</dt><dd>${b(e.stake)}${e.locked?a`, ${b(e.locked)} locked`:null}</dd>
              <dt>Memory</dt><dd>${e.vram_gb} GB offered${e.live?a`, ${S(e.vram_free_bytes)} free`:null}</dd>
              ${e.live?a`<dt>Uptime</dt><dd>${It(e.uptime)} <span class="quiet">of the last 24 hours, as far as
                      this server was running</span></dd>
                    <dt>Class</dt><dd>${e.class}</dd>
                    <dt>Operator</dt><dd>${g("accounts",e.operator)}</dd>
                    <dt>Endpoint</dt><dd class="mono">${e.endpoint}</dd>`:null}
            </dl>
            ${e.tasks.length?a`<h2>Tasks in memory</h2><ul class="tasks">${e.tasks.map(r=>a`<li title=${r.id}>${r.model_id?a`${g("models",r.model_id,r.model)} ${r.task}`:a`<span class="mono">${w(r.id)}</span>`}</li>`)}</ul>`:null}`:null}
      ${e||t.totals.payout?a`<h2>Earned by day</h2>
            <earnings-view .path=${`/explorer/v1/accounts/${t.address}/earnings`}></earnings-view>`:null}
      <h2>Requests</h2>
      <executions-view embedded .base=${`/explorer/v1/executions?of=${t.address}`}></executions-view>
      <h2>On chain</h2>
      ${vt(t.events)}${this.turner()}`}},oe=class extends y{constructor(){super(...arguments);this.period=6e4}render(){return this.data?Fe(this.data.days):_(this.error,!0)}},ae=class extends y{render(){let t=this.data;return t?a`${_(this.error,!1)}<h1>Committee</h1>
      <dl>
        <dt>Configuration</dt><dd>${t.configuration}</dd>
        <dt>Quorum</dt><dd>${t.quorum} of ${t.members.length} members</dd>
        <dt>Epoch</dt><dd>${x(t.epoch)}</dd>
        <dt>List of nodes</dt><dd>number ${x(t.snapshot)}</dd>
        <dt>Group key</dt><dd class="mono">${t.group_key||"none yet"}</dd>
      </dl>
      <div class="scroll"><table>
        <thead><tr><th>Member</th><th>Endpoint</th><th class="number">Bond</th></tr></thead>
        <tbody>${t.members.map(e=>a`<tr><td>${g("accounts",e.address)}</td><td class="mono">${e.endpoint}</td>
            <td class="number">${b(e.bond)}</td></tr>`)}</tbody></table></div>
      <h2>Randomness</h2>
      ${t.randomness.length?a`<p class="quiet">Each seed is the hash of a threshold signature, which no member could choose.</p>
            <div class="scroll"><table>
              <thead><tr><th>Seed</th><th>Execution</th><th class="number">Block</th></tr></thead>
              <tbody>${t.randomness.map(e=>a`<tr><td class="mono" title=${e.seed}>${w(e.seed)}</td><td>${g("executions",e.execution)}</td>
                  <td class="number">${x(e.block)}</td></tr>`)}</tbody></table></div>`:a`<p class="quiet">None yet.</p>`}
      <h2>On chain</h2>
      ${vt(t.events)}`:_(this.error,!0)}},le=class extends y{constructor(){super(...arguments);this.period=0}render(){return a`<h1>Search</h1>
      ${_(this.error,!this.data)}
      ${this.data&&!this.data.results.length?a`<p class="quiet">Nothing begins like this.</p>`:null}
      <ul class="results">${this.data?.results.map(e=>a`<li><span class="badge">${e.kind}</span>
          <a href="#/${e.kind}s/${e.id}">${e.name||a`<span class="mono">${e.id}</span>`}</a></li>`)}</ul>`}};customElements.define("nodes-view",ee);customElements.define("models-view",se);customElements.define("model-view",re);customElements.define("executions-view",ne);customElements.define("earnings-view",oe);customElements.define("account-view",ie);customElements.define("committee-view",ae);customElements.define("search-view",le);var dr=[["chat","Chat"],["nodes","Nodes"],["models","Models"],["executions","Executions"],["committee","Committee"]],ce=class extends O{constructor(){super();this.chat=new ot;this.route=bs(),this.needsKey=!1,addEventListener("hashchange",()=>{this.route=bs(),this.updateComplete.then(()=>this.querySelector("main")?.focus())}),this.addEventListener("key-needed",()=>this.needsKey=!0)}static{this.properties={route:{state:!0},needsKey:{state:!0}}}view(){let[e,r=""]=this.route,n="/explorer/v1";switch(e){case"nodes":return a`<nodes-view .base=${`${n}/nodes`}></nodes-view>`;case"models":return r?a`<model-view .path=${`${n}/models/${encodeURIComponent(r)}`}></model-view>`:a`<models-view .base=${`${n}/models`}></models-view>`;case"executions":return r?a`<execution-view .execution=${encodeURIComponent(r)}></execution-view>`:a`<executions-view .base=${`${n}/executions`}></executions-view>`;case"accounts":return a`<account-view .base=${`${n}/accounts/${encodeURIComponent(r)}`}></account-view>`;case"committee":return a`<committee-view .path=${`${n}/committee`}></committee-view>`;case"search":return a`<search-view .path=${`${n}/search?q=${encodeURIComponent(r)}`}></search-view>`;default:return a`${this.chat}`}}search(e){e.preventDefault();let r=e.target.querySelector("input").value.trim();r&&(location.hash=`#/search/${encodeURIComponent(r)}`)}saveKey(e){e.preventDefault();let r=e.target,[n,i]=r.querySelectorAll("input");Ue(n.value.trim(),i.checked),this.needsKey=!1,this.route[0]==="chat"?this.chat.load():location.reload()}keyForm(){return a`<form class="key" @submit=${this.saveKey}>
      <label>API key <input type="password" autocomplete="off" spellcheck="false" placeholder="sk-splitup-…" .value=${D()}></label>
      <label class="check"><input type="checkbox" ?checked=${Me()}> Remember on this device</label>
      <button class="primary">Use</button>
      <p class="quiet">Without this the key is forgotten with the tab. Create one with: splitup keys new NAME</p>
    </form>`}render(){let[e]=this.route;return a`
      <a class="skip" href="#/${this.route.join("/")}" @click=${r=>{r.preventDefault(),this.querySelector("main").focus()}}>Skip to content</a>
      <header>
        <a class="brand" href="#/chat"><img src="/icon.svg" alt="" width="22" height="22">SplitUp</a>
        <nav aria-label="Sections">${dr.map(([r,n])=>a`<a href="#/${r}" aria-current=${r===e?"page":"false"}>${n}</a>`)}</nav>
        <form role="search" @submit=${this.search}>
          <input type="search" placeholder="Address, model or execution" aria-label="Search the network">
        </form>
      </header>
      <health-view path="/health"></health-view>
      ${this.needsKey?this.keyForm():null}
      <main tabindex="-1" class=${e==="chat"?"full":""}>${this.view()}</main>`}};function bs(){let s=location.hash.replace(/^#\/?/,"").split("/").filter(Boolean);try{return s.length?s.map(decodeURIComponent):["chat"]}catch{return["chat"]}}var de=class extends y{render(){let e=this.error||(this.data?.status==="waiting"?"The network does not answer, or no live nodes serve a model: texts wait, and what is shown may be out of date.":"");return e?a`<p class="health" role="status">${e}</p>`:null}};customElements.define("health-view",de);customElements.define("splitup-app",ce);
/*! Bundled license information:

@lit/reactive-element/css-tag.js:
  (**
   * @license
   * Copyright 2019 Google LLC
   * SPDX-License-Identifier: BSD-3-Clause
   *)

@lit/reactive-element/reactive-element.js:
lit-html/lit-html.js:
lit-element/lit-element.js:
  (**
   * @license
   * Copyright 2017 Google LLC
   * SPDX-License-Identifier: BSD-3-Clause
   *)

lit-html/is-server.js:
  (**
   * @license
   * Copyright 2022 Google LLC
   * SPDX-License-Identifier: BSD-3-Clause
   *)
*/
